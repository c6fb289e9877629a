"""Handrail as its users write it: `server_handrail.py COUNT [PORT]` serves so many tools on stdio, or over HTTP."""

from __future__ import annotations

import sys

from benchmarks.tools import tools
from handrail import Server

__all__ = ["build"]


def build(count: int) -> Server:
    server = Server("bench")
    for tool in tools(count):
        server.tool(tool)
    return server


if __name__ == "__main__":
    count, *port = map(int, sys.argv[1:])
    if port:
        build(count).run(http=f"127.0.0.1:{port[0]}")
    else:
        build(count).run()
