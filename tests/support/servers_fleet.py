"""The server of the fleet's tests. `pay` notes each run in a file that all replicas can see."""

from __future__ import annotations

import os
import time
from pathlib import Path

from handrail import Call, Server

server = Server("fleet", version="1")
if offset := float(os.environ.get("FLEET_CLOCK", "0")):  # a machine whose clock is wrong
    server.engine.clock = lambda: time.time() + offset
RUNS = Path(os.environ.get("FLEET_FOLDER", ".")) / "runs"


@server.tool(read_only=True)
async def pid() -> str:
    """Return the process."""
    return str(os.getpid())


@server.tool(destructive=True)
async def pay(to: str) -> str:
    """Pay somebody, which has to be approved."""
    with RUNS.open("a") as file:
        file.write(f"{to} {os.getpid()}\n")
    return f"paid {to}"


@server.tool(idempotent=False, destructive=False)
async def note(number: int) -> str:
    """Leave a mark that all replicas can see: the effect of a call."""
    with RUNS.with_name("notes").open("a") as file:
        file.write(f"{number}\n")
    return f"noted {number}"


@server.tool(read_only=True)
async def limited() -> str:
    """Count against the shared limits."""
    return str(os.getpid())


@server.tool(read_only=True)
async def name(call: Call) -> str:
    """Ask for a name."""
    answer = await call.ask("Who?", {"type": "object", "properties": {"name": {"type": "string"}}})
    return str(answer.content)
