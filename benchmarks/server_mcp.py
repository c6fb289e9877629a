"""The `mcp` package's high-level server: `server_mcp.py COUNT` serves so many tools on stdio."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.tools import tools

if __name__ == "__main__":
    # By name: the package lives in an environment of its own, where the type checker does not look.
    # Quiet, because a log line per call would be counted against it.
    server = import_module("mcp.server").MCPServer("bench", log_level="ERROR")
    for tool in tools(int(sys.argv[1])):
        server.add_tool(tool)
    server.run("stdio")
