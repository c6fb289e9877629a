"""Handrail as its users write it: `server_handrail.py COUNT` serves so many tools on stdio."""

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
    build(int(sys.argv[1])).run()
