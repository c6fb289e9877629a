"""Handrail as its users write it: `server_handrail.py COUNT [PORT]` serves so many tools on stdio, or over HTTP."""

from __future__ import annotations

import sys

from benchmarks.tools import tools
from handrail import Server
from handrail.guards.limits import Rates

__all__ = ["build"]

# As many as come: the driver is one address, and asks for more than the defaults allow. They are counted all the same.
NEVER_MET = Rates(principal="100000000/second", address="100000000/second", lists="100000000/second")


def build(count: int) -> Server:
    server = Server("bench", rates=NEVER_MET)
    for tool in tools(count):
        server.tool(tool)
    return server


if __name__ == "__main__":
    count, *port = map(int, sys.argv[1:])
    if port:
        build(count).run(http=f"127.0.0.1:{port[0]}")
    else:
        build(count).run()
