"""A command with a state, behind the gateways of the fleet's tests: it counts its calls, and asks for a name."""

from __future__ import annotations

import os
import time
from pathlib import Path

from handrail import Call, Server

server = Server("counter", version="1")
count = 0


@server.tool(read_only=True)
async def step() -> str:
    """Return how often this process was asked, and which it is."""
    global count
    count += 1
    return f"{count} {os.getpid()}"


@server.tool(read_only=True)
async def name(call: Call) -> str:
    """Ask for a name; return it with the process."""
    answer = await call.ask("Who?", {"type": "object", "properties": {"name": {"type": "string"}}})
    return f"{answer.content} {os.getpid()}"


@server.tool(read_only=True)
def hold(file: str) -> str:
    """Return the process when there is a file of this name; note the begin beside it."""
    Path(f"{file}-begun").touch()
    while not Path(file).exists():
        time.sleep(0.02)
    return str(os.getpid())


if __name__ == "__main__":
    server.run()
